"""Prepared data: made once, verified by a manifest, dealt to ranks."""

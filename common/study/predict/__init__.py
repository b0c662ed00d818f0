"""The predictions of minutes and cost: here, on more devices, at a price."""

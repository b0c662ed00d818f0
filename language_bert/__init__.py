"""BERT-large on Wikipedia, to 0.72 masked-LM accuracy."""

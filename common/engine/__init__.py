"""What draft and target both need of a model. Torch lives here."""

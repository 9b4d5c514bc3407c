"""Trained predictors, each a folder with its weights and the card that says how it was made."""

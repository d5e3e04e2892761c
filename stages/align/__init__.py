"""Stages of the align flow: from a pre-trained model to an aligned one, round by round."""

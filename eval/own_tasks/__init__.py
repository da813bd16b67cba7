"""Tasks of the user's own: a file that describes them, models that are compared on them."""

"""`cramming adapt`: a published checkpoint, trained further on text of one's own, and what that brought."""

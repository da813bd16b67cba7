"""`cramming diagnose`: why a model does not learn, with evidence and the override that would change it."""

"""Cramming: how good a BERT-style language model can one GPU train from scratch in one day?

`cramming` is the library and the timed part; `data_prep` makes corpora, `eval` scores models. Start reading at
`cramming/cli.py` (the verbs) and `cramming/pretrain.py` (the experiment).
"""

__version__ = "0.1.0"

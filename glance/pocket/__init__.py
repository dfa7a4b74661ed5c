"""The embedded target: renders five tasks, trains a small vision-language model that reads them, and measures it.

`render` is the door to the pages, `train_target` to the weights in `data/pocket/target`, `evaluate` to the figures in
`data/pocket/CARD.md`. Nothing outside this folder imports it, except commands and tests.
"""

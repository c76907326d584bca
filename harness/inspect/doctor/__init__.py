"""`harness doctor`: checks of a host and a store before training on them."""

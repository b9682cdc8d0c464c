"""One module per command; `sft`, `dpo` and `reward` are `train` with their objective."""

"""The model: math only. `config` describes it, `encoder` and `heads` are it, `export` reads and writes folders."""

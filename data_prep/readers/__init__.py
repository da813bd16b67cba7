"""Where text comes from: the embedded corpus, local files, dumps, the hub, and mixes of them."""

"""The policy: presets, the one forward, tokenizer and chat format."""

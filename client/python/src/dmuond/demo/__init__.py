"""The demo: a small language model trained through dmuond, and by AdamW, and compared."""

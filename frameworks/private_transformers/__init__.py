"""private-transformers, DP fine-tuning of Hugging Face models."""

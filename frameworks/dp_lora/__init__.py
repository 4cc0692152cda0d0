"""The contestant dp-lora."""

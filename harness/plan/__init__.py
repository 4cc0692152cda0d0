"""What is measured, as pure data: contestants, presets, protocols, jobs."""

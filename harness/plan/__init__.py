"""Plans of measurements, as pure data: contestants, presets, protocols, jobs."""

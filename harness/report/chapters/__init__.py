"""The chapters of a report: each turns frames into sections."""

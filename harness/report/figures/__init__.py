"""The figures of a report. Each stands alone: units, machine, date, n."""

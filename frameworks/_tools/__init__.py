"""Programs that the harness runs in a framework's environment: references, evaluation, devices."""

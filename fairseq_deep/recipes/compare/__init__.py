"""Systems trained under equal conditions, in one table and one picture."""

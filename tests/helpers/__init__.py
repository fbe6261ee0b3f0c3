"""What the tests share. No test module imports another one."""

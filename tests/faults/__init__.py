"""The fault matrix: each row a test, on hosts with real OpenSSH."""

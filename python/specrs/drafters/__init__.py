"""What proposes tokens. Knows no requests: flat rows in, draft tokens out."""

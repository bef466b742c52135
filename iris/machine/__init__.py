"""What was measured of machines, by GPU: tables that ship with Iris, and a user's own."""

"""dispatch and combine for few tokens: one hop, no fence, and no flag after the data."""

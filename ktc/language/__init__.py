"""The rule language: its grammar's meaning, its checks, and the pages of `ktc explain`. It needs no torch."""

"""Load tests of `ktc serve`: many clients of OpenAI's API, and one."""

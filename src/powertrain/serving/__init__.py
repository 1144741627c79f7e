"""`powertrain serve`: one model behind the OpenAI API. Requests as values, one generation at a time, answers over HTTP."""

"""From sources of any format to rows, and from rows to what they mean: conversations, pairs, spans, texts."""

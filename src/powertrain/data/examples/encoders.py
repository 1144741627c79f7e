"""The encoder of each kind of sample."""

from collections.abc import Mapping

from powertrain.data.examples.encoding import ConversationEncoder, Encoder, PairEncoder, SpanEncoder, TextEncoder
from powertrain.data.examples.preferences import PreferenceEncoder, RatingEncoder, ScoredEncoder

ENCODERS: Mapping[str, type[Encoder]] = {
    "conversation": ConversationEncoder, "pair": PairEncoder, "span": SpanEncoder, "text": TextEncoder,
    "preference": PreferenceEncoder, "comparison": ScoredEncoder, "rating": RatingEncoder}

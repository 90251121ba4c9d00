"""The messages of the wire contract that a caller of the core fills in or reads.

They are protobuf messages; proto/dmuond/v1/types.proto gives every field's unit and meaning.
"""

from dmuond._proto.trainer_pb2 import (
    STATE_KIND_EXP_AVG,
    STATE_KIND_EXP_AVG_SQ,
    STATE_KIND_MASTER,
    STATE_KIND_MOMENTUM,
    STATE_KIND_STEP,
    OpenSessionRequest,
)
from dmuond._proto.types_pb2 import (
    CONTRIBUTION_NONE,
    CONTRIBUTION_SAME,
    CONTRIBUTION_SUM,
    ELEMENT_TYPE_BFLOAT16,
    ELEMENT_TYPE_FLOAT16,
    ELEMENT_TYPE_FLOAT32,
    ROUTE_ADAMW,
    ROUTE_MUON,
    ROUTE_TRAINER,
    Awaited,
    Box,
    Coefficients,
    Fragment,
    GroupConfig,
    GroupScalars,
    MatrixView,
    Outcome,
    Parameter,
    RoutingRow,
    Slice,
    StepScalars,
    StepTiming,
)

RESUME_NEVER = OpenSessionRequest.RESUME_NEVER
RESUME_IF_PRESENT = OpenSessionRequest.RESUME_IF_PRESENT
RESUME_REQUIRE = OpenSessionRequest.RESUME_REQUIRE
RESUME_DISCARD = OpenSessionRequest.RESUME_DISCARD
RESUMES = {
    "never": RESUME_NEVER,
    "if_present": RESUME_IF_PRESENT,
    "require": RESUME_REQUIRE,
    "discard": RESUME_DISCARD,
}

# Bytes of one element.
ELEMENT_BYTES = {ELEMENT_TYPE_FLOAT32: 4, ELEMENT_TYPE_BFLOAT16: 2, ELEMENT_TYPE_FLOAT16: 2}

__all__ = [
    "CONTRIBUTION_NONE",
    "CONTRIBUTION_SAME",
    "CONTRIBUTION_SUM",
    "ELEMENT_BYTES",
    "ELEMENT_TYPE_BFLOAT16",
    "ELEMENT_TYPE_FLOAT16",
    "ELEMENT_TYPE_FLOAT32",
    "RESUME_DISCARD",
    "RESUME_IF_PRESENT",
    "RESUME_NEVER",
    "RESUMES",
    "RESUME_REQUIRE",
    "ROUTE_ADAMW",
    "ROUTE_MUON",
    "ROUTE_TRAINER",
    "STATE_KIND_EXP_AVG",
    "STATE_KIND_EXP_AVG_SQ",
    "STATE_KIND_MASTER",
    "STATE_KIND_MOMENTUM",
    "STATE_KIND_STEP",
    "Awaited",
    "Box",
    "Coefficients",
    "Fragment",
    "GroupConfig",
    "GroupScalars",
    "MatrixView",
    "Outcome",
    "Parameter",
    "RoutingRow",
    "Slice",
    "StepScalars",
    "StepTiming",
]

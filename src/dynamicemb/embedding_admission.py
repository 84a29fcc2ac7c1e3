"""Import path kept for existing code; see :mod:`dynamicemb.admission`."""

from dynamicemb.admission import (
    AdmissionStrategy,
    Counter,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)

__all__ = [
    "AdmissionStrategy",
    "Counter",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ProbabilityAdmissionStrategy",
]

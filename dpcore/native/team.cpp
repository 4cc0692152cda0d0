// Whose threads the kernels run on.

#include "vectors.h"

Team dpcore_team = nullptr;

// ``runs``: GOMP_parallel of the runtime in which torch computes, or null for threads of each call's own.
extern "C" void dpcore_use_team(Team runs) { dpcore_team = runs; }

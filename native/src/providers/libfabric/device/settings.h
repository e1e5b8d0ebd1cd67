// settings.h: what the library reads from the environment, once, when it is asked for the first time in a process.
#pragma once

#include "providers/libfabric/device/library.h"

namespace asyncfabric::libfabric {

// Makes the library read its settings now, with ours where the user gave none. Right after it was opened, once.
void initialise(const Library& library);

}  // namespace asyncfabric::libfabric

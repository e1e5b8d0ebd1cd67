// build_info.h: what was compiled in, for people and for skips in tests. Constant for a build; any thread.
// Defined by src/provider/catalog.cc, the only file that names the providers.
#pragma once

#include <string>
#include <vector>

namespace asyncfabric {

std::vector<std::string> provider_names();  // built in, whether or not their library is present on this machine

}  // namespace asyncfabric

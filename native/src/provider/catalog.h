// catalog.h: provider names to their open functions. catalog.cc is the only file that names the providers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "provider/provider.h"

namespace asyncfabric {

Status open_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
// Adds a provider that is not in the list, for tests and for providers that live elsewhere. Before the first engine is opened.
void add_provider(const std::string& name, OpenRail open);
std::vector<std::string> provider_names();  // built in, whether or not their library is present

}  // namespace asyncfabric

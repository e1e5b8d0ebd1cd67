// catalog.cc: the only file that names the providers. Those whose headers were missing at build time are left out.
#include "provider/catalog.h"

#include <string_view>

namespace asyncfabric {

// Each provider folder defines exactly one of these.
Status open_local_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
Status open_cuda_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
Status open_fault_rail(const RailSpec& spec, OpenRail inner, std::unique_ptr<Rail>* out, std::string* detail);
#ifdef ASYNCFABRIC_WITH_LIBFABRIC
Status open_libfabric_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
#endif
#ifdef ASYNCFABRIC_WITH_VERBS
Status open_verbs_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
#endif

namespace {

constexpr std::string_view kFaultPrefix = "fault+";

struct Entry {
  const char* name;
  OpenRail open;
};

constexpr Entry kEntries[] = {
    {"local", open_local_rail},   {"cuda", open_cuda_rail},
#ifdef ASYNCFABRIC_WITH_LIBFABRIC
    {"tcp", open_libfabric_rail}, {"efa", open_libfabric_rail}, {"ofi-verbs", open_libfabric_rail},
#endif
#ifdef ASYNCFABRIC_WITH_VERBS
    {"verbs", open_verbs_rail},
#endif
};

std::vector<std::pair<std::string, OpenRail>>& added() {
  static std::vector<std::pair<std::string, OpenRail>> list;
  return list;
}

}  // namespace

void add_provider(const std::string& name, OpenRail open) { added().emplace_back(name, open); }

Status open_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
  if (spec.provider.starts_with(kFaultPrefix)) return open_fault_rail(spec, open_rail, out, detail);
  for (const Entry& entry : kEntries)
    if (spec.provider == entry.name) return entry.open(spec, out, detail);
  for (const auto& [name, open] : added())
    if (spec.provider == name) return open(spec, out, detail);
  *detail = "no provider named '" + spec.provider + "' in this build; built in:";
  for (const std::string& name : provider_names()) *detail += " " + name;
  return StatusCode::kNoProvider;
}

std::vector<std::string> provider_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) names.emplace_back(entry.name);
  for (const auto& [name, open] : added()) names.push_back(name);
  return names;
}

}  // namespace asyncfabric

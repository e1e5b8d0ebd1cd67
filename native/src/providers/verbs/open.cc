// open.cc: from a RailSpec to an open rail. On the opening thread.
#include "providers/verbs/device/library.h"
#include "providers/verbs/options.h"
#include "providers/verbs/rail.h"

namespace asyncfabric {

Status open_verbs_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
  verbs::Options options;
  if (const Status status = verbs::parse_options(spec, &options, detail); !status.ok()) return status;
  const verbs::Library* library = verbs::open_library(options.library, detail);
  if (library == nullptr) return StatusCode::kNoProvider;
  return verbs::VerbsRail::open(*library, options, out, detail);
}

}  // namespace asyncfabric

// open.cc: from a RailSpec to an open rail: options, library, profile, libfabric's choice. On the opening thread.
#include <charconv>
#include <string>

#include "provider/provider.h"
#include "providers/libfabric/device/errors.h"
#include "providers/libfabric/rail.h"

namespace asyncfabric {
namespace {

using libfabric::PostLimits;
using libfabric::Profile;
using libfabric::Selection;

struct Options {
  Selection selection;
  std::string library;
  PostLimits post_limits;
};

bool parse_number(const std::string& text, uint32_t* out) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, *out);
  return result.ec == std::errc() && result.ptr == end;
}

Status parse_options(const RailSpec& spec, const Profile& profile, Options* out, std::string* detail) {
  out->selection.device = spec.device;
  out->post_limits = {profile.eager_posts, profile.posts_per_pass};
  for (const auto& [name, value] : spec.options) {
    bool valid = true;
    if (name == "prov")
      out->selection.provider = value;
    else if (name == "library")
      out->library = value;
    else if (name == "address" && profile.binds_address)
      out->selection.address = value;
    else if (name == "eager_posts")
      valid = parse_number(value, &out->post_limits.eager_posts);
    else if (name == "posts_per_pass")
      valid = parse_number(value, &out->post_limits.posts_per_pass);
    else {
      *detail = "the provider '" + spec.provider + "' has no option '" + name +
                "'; it has prov, library, eager_posts, posts_per_pass" + (profile.binds_address ? ", address" : "");
      return StatusCode::kInvalidArgument;
    }
    if (!valid) {
      *detail =
          "the option '" + name + "' of the provider '" + spec.provider + "' must be a number, not '" + value + "'";
      return StatusCode::kInvalidArgument;
    }
  }
  return StatusCode::kOk;
}

}  // namespace

Status open_libfabric_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
  const Profile* profile = libfabric::find_profile(spec.provider);
  if (profile == nullptr) {
    *detail = "libfabric has no profile named '" + spec.provider + "'";
    return StatusCode::kNoProvider;
  }
  Options options;
  if (const Status status = parse_options(spec, *profile, &options, detail); !status.ok()) return status;
  const libfabric::Library* library = libfabric::open_library(options.library, detail);
  if (library == nullptr) return StatusCode::kNoProvider;
  libfabric::Info info = libfabric::select_info(*library, *profile, options.selection, detail);
  if (!info) return StatusCode::kNoProvider;
  return libfabric::LibfabricRail::open(*library, *profile, std::move(info), options.post_limits, out, detail);
}

}  // namespace asyncfabric

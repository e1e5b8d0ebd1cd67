// profile.cc: from a profile and a caller's wishes to one fi_info. Runs on the thread that opens a rail.
#include "providers/libfabric/device/profile.h"

#include <cstring>
#include <mutex>

#include "providers/libfabric/device/signals.h"

namespace asyncfabric::libfabric {
namespace {

int get_info(const Library& library, uint32_t api, const char* node, uint64_t flags, const fi_info* hints,
             fi_info** out) {
  static std::mutex mutex;  // the first call initialises every provider of the library
  const std::lock_guard<std::mutex> guard(mutex);
  const KeepSignalHandlers keep;
  return library.fi_getinfo(api, node, nullptr, flags, hints, out);
}

Info make_hints(const Library& library, const Profile& profile, const Selection& selection, const char* provider,
                bool gpu_memory) {
  Info hints(library, library.fi_dupinfo(nullptr));
  if (!hints) return hints;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (gpu_memory) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  hints->domain_attr->threading = FI_THREAD_DOMAIN;  // the engine lock serialises all calls on a rail
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->fabric_attr->prov_name = strdup(provider);
  if (!selection.device.empty()) hints->domain_attr->name = strdup(selection.device.c_str());
  if (profile.shape_hints != nullptr) profile.shape_hints(*hints.get());
  return hints;
}

// libfabric also offers layered providers under the name of their core ("net" -> "net;ofi_rxm"): only exact names count.
// And net does not mind the name of the interface.
bool matches(const fi_info& info, const char* provider, const std::string& device) {
  return std::strcmp(info.fabric_attr->prov_name, provider) == 0 &&
         (device.empty() || device == info.domain_attr->name);
}

Info query(const Library& library, const Profile& profile, const Selection& selection, const char* provider,
           bool gpu_memory, std::string* detail) {
  const Info hints = make_hints(library, profile, selection, provider, gpu_memory);
  const char* node = nullptr;
  if (profile.binds_address) {
    if (!selection.address.empty())
      node = selection.address.c_str();
    else if (selection.device.empty())
      node = profile.default_address;
  }
  fi_info* found = nullptr;
  const uint32_t api = profile.gpu_memory ? library.newest_api : kOldestApi;
  const int error = get_info(library, api, node, node != nullptr ? FI_SOURCE : 0, hints.get(), &found);
  if (error != 0) {
    *detail += std::string("; ") + provider + ": " + library.fi_strerror(-error);
    return Info();
  }
  const Info list(library, found);
  for (fi_info* info = found; info != nullptr; info = info->next)
    if (matches(*info, provider, selection.device)) return Info(library, library.fi_dupinfo(info));
  *detail += std::string("; ") + provider + ": no such device, or only other providers answered";
  return Info();
}

}  // namespace

const Profile* find_profile(std::string_view name) {
  for (const Profile* profile : {&tcp_profile(), &efa_profile(), &verbs_profile()})
    if (profile->name == name) return profile;
  return nullptr;
}

Info select_info(const Library& library, const Profile& profile, const Selection& selection, std::string* detail) {
  std::string tried;
  std::vector<const char*> providers = profile.providers;
  if (!selection.provider.empty()) providers = {selection.provider.c_str()};
  for (const char* provider : providers) {
    Info info;
    std::string without;  // why memory of GPUs cannot be had is no reason to do without the device
    if (profile.gpu_memory) info = query(library, profile, selection, provider, true, &without);
    if (!info) info = query(library, profile, selection, provider, false, &tried);
    if (info) return info;
  }
  *detail = "libfabric " + library.version + " (" + library.path + ") offers nothing for the profile '" +
            std::string(profile.name) + "'" +
            (selection.device.empty() ? "" : " on device '" + selection.device + "'") +
            (selection.address.empty() ? "" : " at address " + selection.address) + tried;
  return Info();
}

}  // namespace asyncfabric::libfabric

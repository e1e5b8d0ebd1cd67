// cemetery.cc: see cemetery.h. Only rails of the shm profile come here.
#include "providers/libfabric/cemetery.h"

#include <map>
#include <mutex>

namespace asyncfabric::libfabric {
namespace {

struct Cemetery {
  std::mutex mutex;
  std::map<std::string, bool> open;  // endpoint name -> linked to another rail of this process
  std::vector<std::unique_ptr<Remains>> kept;
};

Cemetery& cemetery() {
  static auto& only = *new Cemetery();  // never destroyed: rails may close while the process exits
  return only;
}

bool any_linked(const Cemetery& place) {
  for (const auto& [name, linked] : place.open)
    if (linked) return true;
  return false;
}

}  // namespace

void note_open(const std::string& name) {
  Cemetery& place = cemetery();
  const std::lock_guard<std::mutex> guard(place.mutex);
  place.open.emplace(name, false);
}

bool note_link(const std::string& from, const std::string& to) {
  Cemetery& place = cemetery();
  const std::lock_guard<std::mutex> guard(place.mutex);
  const auto target = place.open.find(to);
  const auto source = place.open.find(from);
  if (target == place.open.end() || source == place.open.end()) return false;
  source->second = target->second = true;
  return true;
}

void note_closed(const std::string& name, std::unique_ptr<Remains> remains) {
  Cemetery& place = cemetery();
  const std::lock_guard<std::mutex> guard(place.mutex);
  const auto self = place.open.find(name);
  const bool linked = self != place.open.end() && self->second;
  if (self != place.open.end()) place.open.erase(self);
  if (!linked) {
    remains->close_endpoints();
    return;
  }
  place.kept.push_back(std::move(remains));
  if (any_linked(place)) return;
  for (const auto& kept : place.kept) kept->close_endpoints();
  place.kept.clear();
}

}  // namespace asyncfabric::libfabric

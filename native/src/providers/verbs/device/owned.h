// owned.h: owners of libibverbs objects: unique_ptrs that remember the library's own function. No policy.
// A destroy that fails (the object is still in use) leaks it: nothing better can be done at that point.
#pragma once

#include <infiniband/verbs.h>

#include <memory>

namespace asyncfabric::verbs {

template <class T>
struct Closer {
  int (*close)(T*) = nullptr;
  void operator()(T* object) const { (void)close(object); }
};

template <class T>
using Owned = std::unique_ptr<T, Closer<T>>;

template <class T>
Owned<T> own(T* object, int (*close)(T*)) {
  return Owned<T>(object, Closer<T>{close});
}

}  // namespace asyncfabric::verbs

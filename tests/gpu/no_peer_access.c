// no_peer_access.c: the driver of a machine whose GPUs cannot reach each other, preloaded by test_peer_access.py: what it answers
// there is answered here, everything else is the real driver. Our engine takes its calls from libcuda by dlsym, so that is
// where the few calls are exchanged; CUDA's own runtime (torch) has other ways and keeps the real ones.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_DEVICE = 101, PEER_ACCESS_UNSUPPORTED = 217, MOST = 256 };

typedef unsigned long long Handle;

static void* (*real_dlsym)(void*, const char*);
static int (*real_import)(Handle*, void*, int);
static int (*real_map)(unsigned long long, size_t, size_t, Handle, unsigned long long);
static int (*real_set_access)(unsigned long long, size_t, const void*, size_t);

static Handle imported[MOST];
static unsigned long long foreign[MOST];  // where memory of another process was mapped
static int imports, mappings;

static int can_access_peer(int* can, int device, int peer) {
  (void)device, (void)peer;
  *can = getenv("PEER_ACCESS_STATED") != NULL;
  return 0;
}

static int enable_peer_access(void* context, unsigned flags) {
  (void)context, (void)flags;
  return PEER_ACCESS_UNSUPPORTED;
}

static int import_handle(Handle* handle, void* descriptor, int kind) {
  const int result = real_import(handle, descriptor, kind);
  if (result == 0) imported[imports++ % MOST] = *handle;
  return result;
}

static int map(unsigned long long at, size_t bytes, size_t offset, Handle handle, unsigned long long flags) {
  for (int i = 0; i < imports && i < MOST; ++i)
    if (imported[i] == handle) {
      foreign[mappings++ % MOST] = at;
      break;
    }
  return real_map(at, bytes, offset, handle, flags);
}

static int set_access(unsigned long long at, size_t bytes, const void* rights, size_t count) {
  for (int i = 0; i < mappings && i < MOST; ++i)
    if (foreign[i] == at) return INVALID_DEVICE;
  return real_set_access(at, bytes, rights, count);
}

static int open_legacy(unsigned long long* at) {
  (void)at;
  return PEER_ACCESS_UNSUPPORTED;
}

static const struct {
  const char* name;
  void* instead;
  void** real;
} exchanged[] = {
    {"cuDeviceCanAccessPeer", (void*)can_access_peer, NULL},
    {"cuCtxEnablePeerAccess", (void*)enable_peer_access, NULL},
    {"cuMemImportFromShareableHandle", (void*)import_handle, (void**)&real_import},
    {"cuMemMap", (void*)map, (void**)&real_map},
    {"cuMemSetAccess", (void*)set_access, (void**)&real_set_access},
    {"cuIpcOpenMemHandle_v2", (void*)open_legacy, NULL},
};

__attribute__((constructor)) static void find_dlsym(void) {
  const char* versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
  for (size_t i = 0; i < sizeof versions / sizeof *versions && real_dlsym == NULL; ++i)
    *(void**)&real_dlsym = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
}

void* dlsym(void* restrict library, const char* restrict name) {
  if (real_dlsym == NULL) find_dlsym();
  for (size_t i = 0; i < sizeof exchanged / sizeof *exchanged; ++i)
    if (strcmp(name, exchanged[i].name) == 0) {
      void* found = real_dlsym(library, name);
      if (found == NULL) return NULL;
      if (exchanged[i].real != NULL) *exchanged[i].real = found;
      return exchanged[i].instead;
    }
  return real_dlsym(library, name);  // a jump with -O2: who asks for RTLD_NEXT is still known by its own address
}

// libfabric_efa_test.cc: what the efa profile asks of the library and refuses of it, over a library that this test replaces
// (replaced_libfabric.h): dma-bufs, emulated writes, fork, device memory by CUDA calls. It was not run on the hardware.
#include "libfabric_pair.h"
#include "replaced_libfabric.h"
#include "rigs/replaced_library.h"

namespace asyncfabric::testing {
namespace {

constexpr uint32_t version(uint32_t major, uint32_t minor) { return major << 16 | minor; }

struct LibfabricEfa : ::testing::Test {
  void SetUp() override {
    replaced = std::make_unique<ReplacedLibrary>(ASYNCFABRIC_REPLACED_LIBFABRIC);
    library = replaced->decisions<ReplacedLibfabric>("replaced_libfabric");
    library->version = version(1, 22);
  }
  void TearDown() override { rail.reset(); }
  Status open() { return open_libfabric_rail(spec_of("efa library=" + replaced->path()), &rail, &detail); }

  // Memory of GPU 0 at `base`, in a dma-buf that begins `offset` bytes before it.
  Status register_gpu_memory(uint64_t base, uint64_t length, uint64_t offset) {
    Memory memory;
    memory.base = reinterpret_cast<void*>(base);
    memory.length = length;
    memory.device = 0;
    memory.access = kAccessRemoteWrite;
    memory.dmabuf = 77;
    memory.dmabuf_offset = offset;
    std::string key;
    return rail->register_memory(memory, &region, &key);
  }

  std::unique_ptr<ReplacedLibrary> replaced;
  ReplacedLibfabric* library = nullptr;
  std::unique_ptr<LocalMemory> region;
  std::unique_ptr<Rail> rail;
  std::string detail;
};

// The provider takes a dma-buf only from callers that asked for the interface of 1.20, and lets it begin at base_addr + offset.
TEST_F(LibfabricEfa, MemoryOfAGpuIsRegisteredByItsDmabuf) {
  ASSERT_TRUE(open().ok()) << detail;
  ASSERT_TRUE(register_gpu_memory(0x7000'0000'3000, 1 << 20, 0x3000).ok());
  EXPECT_EQ(library->dmabufs, 1u);
  EXPECT_EQ(library->fd, 77);
  EXPECT_EQ(library->offset, 0x3000u);
  EXPECT_EQ(library->length, 1u << 20);
  EXPECT_EQ(library->iova, 0x7000'0000'3000u) << "where peers address the memory";
  region.reset();
}

TEST_F(LibfabricEfa, AsksEachLibraryForWhatItHas) {
  for (const auto& [has, asked] : {std::pair{version(1, 18), version(1, 17)},
                                   {version(1, 19), version(1, 17)},
                                   {version(1, 20), version(1, 20)},
                                   {version(2, 6), version(1, 20)}}) {
    SetUp();
    library->version = has;
    ASSERT_TRUE(open().ok()) << detail;
    EXPECT_EQ(library->requested, asked) << std::hex << has;
    TearDown();
  }
}

TEST_F(LibfabricEfa, AnOlderLibraryRegistersMemoryOfAGpuByItsAddress) {
  library->version = version(1, 19);
  ASSERT_TRUE(open().ok()) << detail;
  ASSERT_TRUE(register_gpu_memory(0x7000'0000'3000, 1 << 20, 0x3000).ok());
  EXPECT_EQ(library->dmabufs, 0u);
  EXPECT_EQ(library->plain, 1u);
  region.reset();
}

TEST_F(LibfabricEfa, MemoryWhoseDmabufIsRefusedIsRegisteredByItsAddress) {
  library->dmabuf_answer = -EOPNOTSUPP;
  ASSERT_TRUE(open().ok()) << detail;
  ASSERT_TRUE(register_gpu_memory(0x7000'0000'3000, 1 << 20, 0x3000).ok());
  EXPECT_EQ(library->plain, 1u);
  region.reset();
}

// Emulated, a write is copied by the target's library some time after the key was checked: a released region could be written to.
TEST_F(LibfabricEfa, EmulatedWritesAreRefusedByName) {
  library->emulates_writes = true;
  EXPECT_EQ(open().code, StatusCode::kUnsupported);
  EXPECT_NE(detail.find("emulate"), std::string::npos) << detail;
  EXPECT_NE(detail.find("FI_EFA_USE_DEVICE_RDMA"), std::string::npos) << detail;
  EXPECT_EQ(rail, nullptr);
}

TEST_F(LibfabricEfa, ALibraryThatCannotAnswerEmulatesWrites) {
  library->version = version(1, 17);
  library->emulated_answer = -ENOPROTOOPT;
  EXPECT_EQ(open().code, StatusCode::kUnsupported);
  EXPECT_NE(detail.find("1.18"), std::string::npos) << detail;
}

// The provider ends a process that forks while its pages are not safe from that.
TEST_F(LibfabricEfa, WhereAForkWouldEndTheProcessItIsRefusedByName) {
  library->fork_init = EINVAL;  // other code registered memory before
  EXPECT_EQ(open().code, StatusCode::kUnsupported);
  EXPECT_NE(detail.find("fork"), std::string::npos) << detail;
  EXPECT_NE(detail.find("FI_EFA_FORK_SAFE=1"), std::string::npos) << detail;
}

// Device memory that only CUDA calls of the library could move is no memory of this rail; that of the host is.
TEST_F(LibfabricEfa, WhereOnlyCudaCallsReachAGpuItsMemoryIsRefused) {
  library->cuda_option = -EOPNOTSUPP;
  ASSERT_TRUE(open().ok()) << detail;
  EXPECT_EQ(register_gpu_memory(0x7000'0000'3000, 1 << 20, 0x3000).code, StatusCode::kUnsupported);
  EXPECT_EQ(library->dmabufs + library->plain, 0u);
}

}  // namespace
}  // namespace asyncfabric::testing

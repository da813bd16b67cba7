/* The CUDA runtime's answers for one device that is not there, preloaded before libcudart: enough for autograd's device
   threads, the choice of attention kernels, streams and events. Every call succeeds and does nothing. The device is an
   H200, with CARD_MAJOR=8 an A100, with CARD_MAJOR=7 a 2080 Ti. */
#include <stdlib.h>
#include <string.h>
#include <driver_types.h>

static int device;
struct card {
    const char *name;
    int major, minor, processors, threads_per_processor, gib, l2_mib;
    int shared_per_block, shared_per_processor;
};
static const struct card turing = {"NVIDIA GeForce RTX 2080 Ti", 7, 5, 68, 1024, 11, 5, 65536, 65536};
static const struct card ampere = {"NVIDIA A100-SXM4-40GB", 8, 0, 108, 2048, 40, 40, 166912, 167936};
static const struct card hopper = {"NVIDIA H200", 9, 0, 132, 2048, 141, 50, 232448, 233472};

static const struct card *chosen(void) {
    const char *major = getenv("CARD_MAJOR");
    if (major && *major == '7') return &turing;
    if (major && *major == '8') return &ampere;
    return &hopper;
}

int cudaGetDeviceProperties(struct cudaDeviceProp *p, int ignored) {
    const struct card *card = chosen();
    memset(p, 0, sizeof *p);
    strcpy(p->name, card->name);
    p->major = card->major;
    p->minor = card->minor;
    p->multiProcessorCount = card->processors;
    p->totalGlobalMem = (size_t)card->gib << 30;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = card->threads_per_processor;
    p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = card->shared_per_block;
    p->sharedMemPerMultiprocessor = card->shared_per_processor;
    p->l2CacheSize = card->l2_mib << 20;
    return 0;
}
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int number) { return cudaGetDeviceProperties(p, number); }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *number) { *number = device; return 0; }
int cudaSetDevice(int number) { device = number; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int number) { *value = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = (void *)1; return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)2; return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return 0; }
int cudaEventSynchronize(void *event) { return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventDestroy(void *event) { return 0; }

/* libcuda.so.1, opened by name: this library has that name. */
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDevicePrimaryCtxGetState(int number, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stub"; return 0; }

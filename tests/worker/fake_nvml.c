/* As much of NVIDIA's management library as the tests ask: two cards, a MIG instance on the second. */

#include <stdlib.h>
#include <string.h>

typedef struct card { const char *name, *uuid, *address; int major, minor; } card;

static card cards[] = {
    {"NVIDIA H100 80GB HBM3", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "0000:1b:00.0", 9, 0},
    {"NVIDIA B200", "GPU-1b5c1f47-0000-1111-2222-333333333333", "0000:3d:00.0", 10, 0},
};
static card instance = {"", "MIG-d9a47cfb-d1f2-d08c-b40e-0812b597ae69", "", 0, 0};
static int started;

int nvmlInit_v2(void) {
    const char *code = getenv("FAKE_NVML_INIT");
    started += 1;
    return code ? atoi(code) : 0;
}
int nvmlShutdown(void) { return started-- > 0 ? 0 : 1; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Not Found"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, card **found) {
    if (index >= 2) return 2;
    *found = &cards[index];
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, card **found) {
    for (int i = 0; i < 2; i++)
        if (!strcmp(cards[i].address, address)) { *found = &cards[i]; return 0; }
    return 6;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, card **found) {
    if (strcmp(instance.uuid, uuid)) return 6;
    *found = &instance;
    return 0;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(card *mig, card **found) {
    if (mig != &instance) return 2;
    *found = &cards[1];
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(card *asked, int *major, int *minor) {
    if (getenv("FAKE_NVML_LOST")) return 15;
    *major = asked->major;
    *minor = asked->minor;
    return 0;
}
int nvmlDeviceGetName(card *asked, char *text, unsigned size) { strncpy(text, asked->name, size); return 0; }
int nvmlDeviceGetUUID(card *asked, char *text, unsigned size) { strncpy(text, asked->uuid, size); return 0; }

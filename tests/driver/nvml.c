/* A driver for tests, as libnvidia-ml.so.1: Tesla T4s whose figures and faults stand in the text file $KGORCH_TEST_DRIVER,
 * which is read at each call. Its lines: `gpus 2`, `gpu0.mem_used 123`, `gpu0.uuid GPU-1234`, `gpu0.mig_uuid MIG-1234` for its
 * only MIG instance, `cuda 12040`, and `fail nvmlDeviceGetPowerUsage hang` for a fault of a function. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GPUS = 8, SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NO_SUCH_GPU = 6, INSUFFICIENT_SIZE = 7, NOT_LOADED = 9,
       TIMEOUT = 10, NOT_FOUND = 13, LOST = 15, UNKNOWN = 999 };
typedef unsigned long long u64;
typedef unsigned int u32;
typedef struct { int index; } device_t;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { u32 gpu, memory; } utilization_t;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } process_t;
typedef struct { device_t *device; u64 type, data; u32 gpu_instance, compute_instance; } event_t;

static device_t devices[GPUS] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static int told[GPUS]; /* XIDs handed out already */

/* The value behind `key ` in the file; 0 when it is not there. */
static int look(const char *key, char *value) {
    char line[256], format[160];
    FILE *file = fopen(getenv("KGORCH_TEST_DRIVER") ? getenv("KGORCH_TEST_DRIVER") : "", "r");
    int found = 0;
    snprintf(format, sizeof format, "%s ", key);
    while (file && !found && fgets(line, sizeof line, file))
        if (!strncmp(line, format, strlen(format))) {
            sscanf(line + strlen(format), "%99s", value);
            found = 1;
        }
    if (file) fclose(file);
    return found;
}

static u64 figure(device_t *device, const char *name) {
    char key[100], value[100];
    snprintf(key, sizeof key, "gpu%d.%s", device->index, name);
    return look(key, value) ? strtoull(value, NULL, 10) : 0;
}

static u32 gpus(void) {
    char value[100];
    return look("gpus", value) ? strtoul(value, NULL, 10) : 2;
}

static int name_of(device_t *device, const char *key, char *value) {
    char name[100];
    snprintf(name, sizeof name, "gpu%d.%s", device->index, key);
    return look(name, value);
}

/* The fault of a function as NVML's code; one that hangs does so until the file says otherwise. */
static int fault(const char *function, device_t *device) {
    char key[150], how[100];
    snprintf(key, sizeof key, "fail %s", function);
    while (look(key, how) && !strcmp(how, "hang")) usleep(20000);
    if (device && figure(device, "lost")) return LOST;
    if (!look(key, how)) return SUCCESS;
    if (!strcmp(how, "not_supported")) return NOT_SUPPORTED;
    if (!strcmp(how, "function_not_found")) return NOT_FOUND;
    if (!strcmp(how, "not_loaded")) return NOT_LOADED;
    return !strcmp(how, "gpu_is_lost") ? LOST : UNKNOWN;
}

#define CHECK(device) do { int code = fault(__func__, device); if (code) return code; } while (0)
#define GAUGE(function, name, type) \
    int function(device_t *device, type *value) { CHECK(device); *value = figure(device, name); return SUCCESS; }
#define GAUGE_OF(function, name, other, type) \
    int function(device_t *device, int which, type *value) { \
        CHECK(device); *value = figure(device, which == 2 ? other : name); return SUCCESS; }

int nvmlInitWithFlags(u32 flags) { (void)flags; CHECK(NULL); return SUCCESS; }
int nvmlShutdown(void) { CHECK(NULL); return SUCCESS; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "a fault of the test's driver"; }
int nvmlSystemGetDriverVersion(char *to, u32 room) { CHECK(NULL); snprintf(to, room, "550.0"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    char value[100];
    CHECK(NULL);
    if (!look("cuda", value)) return NOT_FOUND;
    *version = strtol(value, NULL, 10);
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(u32 *count) { CHECK(NULL); *count = gpus(); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, device_t **device) {
    if (index >= gpus()) return INVALID;
    CHECK(&devices[index]);
    if (figure(&devices[index], "forbidden")) return NO_PERMISSION;
    *device = &devices[index];
    return SUCCESS;
}
int nvmlDeviceGetIndex(device_t *device, u32 *index) { CHECK(device); *index = device->index; return SUCCESS; }
int nvmlDeviceGetName(device_t *device, char *to, u32 room) { CHECK(device); snprintf(to, room, "Tesla T4"); return SUCCESS; }
int nvmlDeviceGetUUID(device_t *device, char *to, u32 room) {
    char value[100];
    CHECK(device);
    if (name_of(device, "uuid", value)) snprintf(to, room, "%s", value);
    else snprintf(to, room, "GPU-%08d-0000-0000-0000-000000000000", device->index);
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device) {
    char value[100];
    CHECK(NULL);
    for (u32 i = 0; i < gpus(); i++)
        if ((!nvmlDeviceGetUUID(&devices[i], value, sizeof value) && !strcmp(value, uuid)) ||
            (name_of(&devices[i], "mig_uuid", value) && !strcmp(value, uuid))) {
            *device = &devices[i];
            return SUCCESS;
        }
    return NO_SUCH_GPU;
}
int nvmlDeviceGetMigMode(device_t *device, u32 *current, u32 *pending) {
    CHECK(device);
    *current = *pending = figure(device, "mig");
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory) {
    CHECK(device);
    memory->total = figure(device, "mem_total");
    memory->used = figure(device, "mem_used");
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(device_t *device, utilization_t *rates) {
    CHECK(device);
    rates->gpu = figure(device, "util");
    rates->memory = 0;
    return SUCCESS;
}
GAUGE_OF(nvmlDeviceGetTemperature, "temp_c", "temp_c", u32)
GAUGE_OF(nvmlDeviceGetClockInfo, "sm_mhz", "mem_mhz", u32)
GAUGE(nvmlDeviceGetPowerUsage, "power_mw", u32)
GAUGE(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", u32)
GAUGE(nvmlDeviceGetCurrentClocksEventReasons, "throttle", u64)
GAUGE(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle", u64)
int nvmlDeviceGetTotalEccErrors(device_t *device, int type, int counter, u64 *count) {
    (void)type, (void)counter;
    CHECK(device);
    *count = figure(device, "ecc");
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, u32 *count, process_t *processes) {
    CHECK(device);
    u32 room = *count, running = *count = figure(device, "processes");
    if (!processes || room < running) return running ? INSUFFICIENT_SIZE : SUCCESS;
    for (u32 i = 0; i < running; i++) processes[i] = (process_t){1000 + i, figure(device, "mem_used") / running, -1, -1};
    return SUCCESS;
}
int nvmlEventSetCreate(void **set) { CHECK(NULL); *set = devices; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; CHECK(NULL); return SUCCESS; }
int nvmlDeviceRegisterEvents(device_t *device, u64 types, void *set) { (void)types, (void)set; CHECK(device); return SUCCESS; }
int nvmlEventSetWait_v2(void *set, event_t *event, u32 timeout_ms) {
    (void)set, (void)timeout_ms;
    CHECK(NULL);
    for (u32 i = 0; i < gpus(); i++) {
        int xid = figure(&devices[i], "xid");
        if (xid && xid != told[i]) {
            told[i] = xid;
            *event = (event_t){&devices[i], 8, xid, -1, -1};
            return SUCCESS;
        }
    }
    return TIMEOUT;
}

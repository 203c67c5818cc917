/* Module: what Python imports, `otel_dl.recording._native`. */

#include "native.h"

#ifndef SOURCE
#define SOURCE "" /* the digest of these files, given by hatch_build.py */
#endif

PyObject *str_training, *str_modules, *str_parameters, *str_compiled_call_impl, *str_call_impl, *str_source,
    *str_rcvd_idx, *str_device;
PyObject *empty_string, *zero, *copy;
#ifndef __linux__
PyObject *perf_counter_ns;
#endif

static PyMethodDef functions[] = {{"own_method", own_method, METH_O, NULL},
                                  {"swap_method", swap_method, METH_VARARGS, NULL},
                                  {"subscript", subscript, METH_VARARGS, NULL},
                                  {"swap_subscripts", swap_subscripts, METH_VARARGS, NULL},
                                  {NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "otel_dl.recording._native", .m_size = -1,
                                    .m_methods = functions};

PyMODINIT_FUNC
PyInit__native(void)
{
    static struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {{"StepState", &StepType}, {"LaneState", &LaneType},       {"SourceState", &SourceType},
                 {"Phase", &PhaseType},    {"Forward", &ForwardType},      {"Next", &NextType},
                 {"FastPath", &FastPathType}, {"Returned", &ReturnedType},
                 {"WorkerState", &WorkerType},
                 {"Method", &MethodType},
                 {"Follow", &FollowType},
                 {"Get", &GetType},
                 {"Put", &PutType}};
    static struct {
        PyObject **name;
        const char *text;
    } names[] = {{&str_training, "training"},
                 {&str_modules, "_modules"},
                 {&str_parameters, "_parameters"},
                 {&str_compiled_call_impl, "_compiled_call_impl"},
                 {&str_call_impl, "_call_impl"},
                 {&str_source, "_otel_dl"},
                 {&str_device, "device"},
                 {&str_rcvd_idx, "_rcvd_idx"},
                 {&empty_string, ""}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        *names[i].name = PyUnicode_InternFromString(names[i].text);
        if (*names[i].name == NULL)
            return NULL;
    }
    zero = PyLong_FromLong(0);
    if (zero == NULL)
        return NULL;
    PyObject *copying = PyImport_ImportModule("copy");
    copy = copying == NULL ? NULL : PyObject_GetAttrString(copying, "copy");
    Py_XDECREF(copying);
    if (copy == NULL)
        return NULL;
#ifndef __linux__
    PyObject *time = PyImport_ImportModule("time");
    perf_counter_ns = time == NULL ? NULL : PyObject_GetAttrString(time, "perf_counter_ns");
    Py_XDECREF(time);
    if (perf_counter_ns == NULL)
        return NULL;
#endif
    PyObject *self = PyModule_Create(&module);
    for (size_t i = 0; self != NULL && i < sizeof(types) / sizeof(types[0]); i++) {
        if (PyType_Ready(types[i].type) < 0
            || PyModule_AddObjectRef(self, types[i].name, (PyObject *)types[i].type) < 0)
            Py_CLEAR(self);
    }
    if (self != NULL && PyModule_AddStringConstant(self, "SOURCE", SOURCE) < 0)
        Py_CLEAR(self);
#define ONE(name, value)                                                                                              \
    if (self != NULL && PyModule_AddIntConstant(self, #name, name) < 0)                                               \
        Py_CLEAR(self);
    CONSTANTS(ONE)
#undef ONE
    PyObject *check = PyLong_FromLongLong(CHECK);
    if (self != NULL && (check == NULL || PyModule_AddObjectRef(self, "CHECK", check) < 0))
        Py_CLEAR(self);
    Py_XDECREF(check);
    return self;
}

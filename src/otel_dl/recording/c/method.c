/* Method: what stands in the place of a method of torch.Tensor (`patches/synchronization/method.py` says the same in
 * Python). To whoever asks the class it is `original`, the identical object: `torch.Tensor.item`, its pickle, what
 * torch hands to a `__torch_function__`. A tensor on the CPU, which waits for nothing, gets it as well; any other one,
 * and one that overrides torch's functions, gets `waits`, a Python function, bound to it. */

#include "native.h"

enum { METHOD_READS, METHOD_MOVES, METHOD_ALWAYS };

/* Whether `tensor` is on the CPU and no override of torch's functions can see the question; what is no tensor is. -1 with
 * an exception set where what a signal handler raised is to go on. */
int
tensor_on_cpu(PyObject *overrides, PyObject *is_cpu, PyObject *tensor)
{
    PyTypeObject *base = PyDescr_TYPE(is_cpu);
    if (!PyObject_TypeCheck(tensor, base))
        return 1;
    PyObject *yes = PyObject_CallOneArg(overrides, tensor);
    if (yes == Py_False)
        Py_SETREF(yes, Py_TYPE(is_cpu)->tp_descr_get(is_cpu, tensor, (PyObject *)Py_TYPE(tensor)));
    else
        Py_XSETREF(yes, NULL);
    if (yes == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
    }
    int found = yes == Py_True;
    Py_XDECREF(yes);
    return found;
}

/* Whether a name of a device, or the device itself, is that of the CPU (its class); -1 with an exception. */
int
names_cpu(PyObject *cpu, PyObject *device)
{
    if (PyUnicode_Check(device))
        return PyUnicode_CompareWithASCIIString(device, "cpu") == 0;
    return Py_TYPE(device) == Py_TYPE(cpu) ? PyObject_RichCompareBool(device, cpu, Py_EQ) : 0; /* its name takes 0.4 us */
}

/* Whether `argument` of a call on a tensor that is, or is not, `on_cpu` names no other place than the tensor's; -1 with
 * an exception. */
static int
method_stays(Method *self, PyObject *argument, int on_cpu)
{
    PyTypeObject *type = Py_TYPE(argument);
    if (argument == Py_None || PyBool_Check(argument))
        return 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->harmless); i++) {
        if ((PyObject *)type == PyTuple_GET_ITEM(self->harmless, i))
            return 1;
    }
    if (PyUnicode_Check(argument) || type == Py_TYPE(self->cpu))
        return on_cpu ? names_cpu(self->cpu, argument) : 0;
    return on_cpu && PyObject_TypeCheck(argument, PyDescr_TYPE(self->is_cpu))
               ? tensor_on_cpu(self->overrides, self->is_cpu, argument)
               : 0;
}

/* Whether a call can't wait; -1 with an exception. Of `to` and `copy_` the arguments matter as well. */
int
method_is_plain(Method *self, PyObject *tensor, PyObject *args, PyObject *kwargs)
{
    if (self->form == METHOD_ALWAYS)
        return 0;
    int on_cpu = tensor_on_cpu(self->overrides, self->is_cpu, tensor);
    if (self->form != METHOD_MOVES || on_cpu < 0)
        return on_cpu;
    int plain = 1;
    for (Py_ssize_t i = 0; plain == 1 && args != NULL && i < PyTuple_GET_SIZE(args); i++)
        plain = method_stays(self, PyTuple_GET_ITEM(args, i), on_cpu);
    Py_ssize_t at = 0;
    PyObject *value;
    while (plain == 1 && kwargs != NULL && PyDict_Next(kwargs, &at, NULL, &value))
        plain = method_stays(self, value, on_cpu);
    return plain;
}

static PyObject *
method_call(Method *self, PyObject *args, PyObject *kwargs)
{
    return PyObject_Call(self->waits, args, kwargs);
}

static PyObject *
method_bind(Method *self, PyObject *instance, PyObject *owner)
{
    descrgetfunc bind = Py_TYPE(self->original)->tp_descr_get;
    if (instance == NULL || instance == Py_None)
        return bind(self->original, NULL, owner);
    if (self->form == METHOD_READS) {
        int on_cpu = tensor_on_cpu(self->overrides, self->is_cpu, instance);
        if (on_cpu != 0)
            return on_cpu < 0 ? NULL : bind(self->original, instance, owner);
    }
    return PyMethod_New(self->waits, instance);
}

static PyObject *
method_getattro(PyObject *self, PyObject *name)
{
    /* Its name, its documentation, its signature. Its class it has of its own, so that whoever finds it in the class's
     * dict (torch.compile) binds it, and gets the original. */
    if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0 || PyUnicode_CompareWithASCIIString(name, "__get__") == 0)
        return PyObject_GenericGetAttr(self, name);
    return PyObject_GetAttr(((Method *)self)->original, name);
}

static PyObject *
method_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"original", "waits", "form", "overrides", "is_cpu", "harmless", "cpu", NULL};
    PyObject *original, *waits, *overrides, *is_cpu, *harmless, *cpu;
    int form;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOiOO!O!O", keywords, &original, &waits, &form, &overrides,
                                     &PyGetSetDescr_Type, &is_cpu, &PyTuple_Type, &harmless, &cpu))
        return NULL;
    if (Py_TYPE(original)->tp_descr_get == NULL || form < METHOD_READS || form > METHOD_ALWAYS) {
        PyErr_SetString(PyExc_TypeError, "it is no method, or none of these forms");
        return NULL;
    }
    Method *self = (Method *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->original = Py_NewRef(original);
    self->waits = Py_NewRef(waits);
    self->overrides = Py_NewRef(overrides);
    self->is_cpu = Py_NewRef(is_cpu);
    self->harmless = Py_NewRef(harmless);
    self->cpu = Py_NewRef(cpu);
    self->form = form;
    return (PyObject *)self;
}

static int
method_traverse(Method *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->waits);
    return 0;
}

static void
method_dealloc(Method *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->original);
    Py_XDECREF(self->waits);
    Py_XDECREF(self->overrides);
    Py_XDECREF(self->is_cpu);
    Py_XDECREF(self->harmless);
    Py_XDECREF(self->cpu);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject MethodType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.Method",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = method_new,
    .tp_call = (ternaryfunc)method_call,
    .tp_getattro = method_getattro,
    .tp_descr_get = (descrgetfunc)method_bind,
    .tp_traverse = (traverseproc)method_traverse,
    .tp_dealloc = (destructor)method_dealloc,
};

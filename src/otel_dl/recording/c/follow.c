/* Follow: the calls of a builtin of somebody else's are followed, and nothing of it can be seen.
 *
 * A builtin that takes a tuple and a dict has no `vectorcall` (torch's own, and those of pybind11 2); once it has one,
 * CPython calls that (PyObject_Vectorcall, PyObject_Call; 3.10 to 3.14). One that takes an array and a tuple of names
 * has its own (pybind11 3), which is called from ours. All else about the object stays: which it is, its type and
 * names, its method definition, of whose address its hash is made. One thing is lost: f(**{}) is f().
 *
 * `gate` says whether a call is worth a look: a function without arguments; or (overrides, is_cpu, cpu[, most]), as a
 * Method has them, and then a call is that has to do with another place than the CPU, and `most` arguments at most.
 * Then `begin` gets (args, kwargs or None) and returns None, or what is called with (result, None) or (None, error) once
 * the builtin has returned or raised. What these two raise is raised (see `Patches.fault`), but for want of stack or
 * memory.
 */

#include "native.h"

enum { FOLLOW_MOST = 64 };

typedef struct {
    PyObject_HEAD
    PyObject *function, *gate, *begin;
    PyObject *overrides, *is_cpu, *cpu; /* borrowed from the gate; NULL: it is a function */
    Py_ssize_t most;
    vectorcallfunc own; /* the builtin's, if it has one */
    char always; /* the gate is open whatever it says */
} Follow;

static Follow *follow_all[FOLLOW_MOST]; /* those in force, each with a reference, from where its address says on */

/* The place in `follow_all` of this function, or a free one where it is NULL; or NULL. */
static inline Follow **
follow_find(PyObject *near, PyObject *function)
{
    size_t at = (size_t)near / sizeof(PyCFunctionObject);
    for (size_t i = 0; i < FOLLOW_MOST; i++) {
        Follow **each = &follow_all[(at + i) % FOLLOW_MOST];
        if (function == NULL ? *each == NULL : *each != NULL && (*each)->function == function)
            return each;
    }
    return NULL;
}

/* Whether the first tensor among the arguments, or in a list of them, is not on the CPU, or `device` names another place;
 * -1 with an exception. */
static int
follow_leaves_cpu(Follow *self, PyObject *args, PyObject *kwargs)
{
    PyObject *first = NULL, *value;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; first == NULL; i++) {
        if (i < PyTuple_GET_SIZE(args))
            value = PyTuple_GET_ITEM(args, i);
        else if (kwargs == NULL || !PyDict_Next(kwargs, &at, NULL, &value))
            break;
        for (int depth = 0; depth < 8 && (PyList_CheckExact(value) || PyTuple_CheckExact(value)) && Py_SIZE(value); depth++)
            value = PySequence_Fast_GET_ITEM(value, 0);
        if (PyObject_TypeCheck(value, PyDescr_TYPE(self->is_cpu)))
            first = Py_NewRef(value);
    }
    int stays = first == NULL ? 1 : tensor_on_cpu(self->overrides, self->is_cpu, first);
    Py_XDECREF(first);
    if (stays == 1 && kwargs != NULL) {
        PyObject *device = PyDict_GetItemWithError(kwargs, str_device);
        if (device != NULL && device != Py_None)
            stays = names_cpu(self->cpu, device);
        else if (device == NULL && PyErr_Occurred())
            stays = -1;
    }
    return stays < 0 ? stays : !stays;
}

/* Whether a call is worth a look; -1 with an exception. */
static int
follow_is_open(Follow *self, PyObject *args, PyObject *kwargs)
{
    if (self->always)
        return 1;
    if (self->is_cpu != NULL) {
        Py_ssize_t count = PyTuple_GET_SIZE(args) + (kwargs == NULL ? 0 : PyDict_GET_SIZE(kwargs));
        return count <= self->most ? follow_leaves_cpu(self, args, kwargs) : 0;
    }
    PyObject *yes = PyObject_CallNoArgs(self->gate);
    Py_XDECREF(yes);
    return yes == NULL ? -1 : yes == Py_True;
}

/* As CPython calls a builtin that has no vectorcall, and one that has. */
static PyObject *
follow_original(PyObject *function, vectorcallfunc own, PyObject *const *stack, size_t nargsf, PyObject *names,
                PyObject *args, PyObject *kwargs)
{
    if (own != NULL)
        return own(function, stack, nargsf, names);
    if (Py_EnterRecursiveCall(" while calling a Python object"))
        return NULL;
    PyObject *result = Py_TYPE(function)->tp_call(function, args, kwargs);
    Py_LeaveRecursiveCall();
    return result;
}

/* Whether what was raised is nobody's fault; then it is cleared. */
static int
follow_had_no_room(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RecursionError) && !PyErr_ExceptionMatches(PyExc_MemoryError))
        return 0;
    PyErr_Clear();
    return 1;
}

/* What `begin` returned; None also where it was not called, NULL with an exception. */
static PyObject *
follow_begin(PyObject *function, PyObject *args, PyObject *kwargs)
{
    Follow **found = follow_find(function, function);
    if (found == NULL)
        return Py_NewRef(Py_None); /* another thread has just restored it */
    Follow *self = (Follow *)Py_NewRef((PyObject *)*found);
    PyObject *given[] = {args, kwargs == NULL ? Py_None : kwargs}, *end = NULL;
    int open = follow_is_open(self, args, kwargs);
    if (open >= 0)
        end = open ? PyObject_Vectorcall(self->begin, given, 2, NULL) : Py_NewRef(Py_None);
    if (end == NULL && follow_had_no_room())
        end = Py_NewRef(Py_None);
    Py_DECREF(self);
    return end;
}

/* Tells `end` of `result`, NULL with an exception; returns the same. Takes the reference. */
static PyObject *
follow_end(PyObject *end, PyObject *result)
{
    PyObject *error = result == NULL ? take_exception() : NULL;
    PyObject *given[] = {result == NULL ? Py_None : result, error == NULL ? Py_None : error};
    PyObject *told = PyObject_Vectorcall(end, given, 2, NULL);
    if (told == NULL && !follow_had_no_room()) {
        Py_XDECREF(result);
        if (error != NULL) {
            PyObject *raised = take_exception();
            PyException_SetContext(raised, error);
            put_exception(raised);
        }
        return NULL;
    }
    Py_XDECREF(told);
    if (error != NULL)
        put_exception(error);
    return result;
}

static PyObject *
follow_call(PyObject *function, PyObject *const *stack, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    PyObject *result = NULL, *end = NULL, *kwargs = NULL, *args = PyTuple_New(count);
    if (args == NULL)
        return NULL;
    Follow **found = follow_find(function, function);
    vectorcallfunc own = found != NULL ? (*found)->own : ((PyCFunctionObject *)function)->vectorcall; /* as restored */
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(args, i, Py_NewRef(stack[i]));
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    if (named && (kwargs = PyDict_New()) == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < named; i++) {
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(names, i), stack[count + i]) < 0)
            goto done;
    }
    end = follow_begin(function, args, kwargs);
    if (end != NULL) {
        result = follow_original(function, own, stack, nargsf, names, args, kwargs);
        if (end != Py_None)
            result = follow_end(end, result);
    }
done:
    Py_XDECREF(end);
    Py_XDECREF(kwargs);
    Py_DECREF(args);
    return result;
}

static PyObject *
follow_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"function", "gate", "begin", NULL};
    PyObject *function, *gate, *begin;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO", keywords, &PyCFunction_Type, &function, &gate, &begin))
        return NULL;
    int flags = PyCFunction_GET_FLAGS(function) & (METH_VARARGS | METH_KEYWORDS | METH_FASTCALL | METH_O | METH_NOARGS);
    vectorcallfunc own = ((PyCFunctionObject *)function)->vectorcall;
    int takes_tuple = flags == (METH_VARARGS | METH_KEYWORDS) && own == NULL;
    int takes_array = flags == (METH_FASTCALL | METH_KEYWORDS) && own != NULL;
    if (!PyCFunction_CheckExact(function) || own == follow_call || !(takes_tuple || takes_array)) {
        PyErr_SetString(PyExc_TypeError, "it is no builtin that takes keywords, or is followed already");
        return NULL;
    }
    PyObject *overrides = NULL, *is_cpu = NULL, *cpu = NULL;
    Py_ssize_t most = PY_SSIZE_T_MAX;
    if (PyTuple_Check(gate)
        && !PyArg_ParseTuple(gate, "OO!O|n;a gate is (overrides, is_cpu, cpu[, most])", &overrides, &PyGetSetDescr_Type,
                             &is_cpu, &cpu, &most))
        return NULL;
    Follow **free = follow_find(function, NULL);
    if (free == NULL) {
        PyErr_SetString(PyExc_ValueError, "so many can't be followed");
        return NULL;
    }
    Follow *self = (Follow *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->function = Py_NewRef(function);
    self->gate = Py_NewRef(gate);
    self->begin = Py_NewRef(begin);
    self->own = own;
    self->overrides = overrides;
    self->is_cpu = is_cpu;
    self->cpu = cpu;
    self->most = most;
    *free = (Follow *)Py_NewRef((PyObject *)self);
    ((PyCFunctionObject *)function)->vectorcall = follow_call;
    return (PyObject *)self;
}

/* Calls that are open, and this may be called from one, go on to their end. Another one's is left alone. */
static PyObject *
follow_restore(Follow *self, PyObject *Py_UNUSED(ignored))
{
    Follow **found = follow_find(self->function, self->function);
    if (found != NULL && *found == self) {
        PyCFunctionObject *function = (PyCFunctionObject *)self->function;
        if (function->vectorcall == follow_call)
            function->vectorcall = self->own;
        *found = NULL;
        Py_DECREF(self);
    }
    Py_RETURN_NONE;
}

static PyMemberDef follow_members[] = {{"always", T_BOOL, offsetof(Follow, always), 0, NULL}, {NULL}};

static PyMethodDef follow_methods[] = {{"restore", (PyCFunction)follow_restore, METH_NOARGS, NULL}, {NULL}};

static int
follow_traverse(Follow *self, visitproc visit, void *arg)
{
    Py_VISIT(self->function);
    Py_VISIT(self->gate);
    Py_VISIT(self->begin);
    return 0;
}

static void
follow_dealloc(Follow *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->function);
    Py_XDECREF(self->gate);
    Py_XDECREF(self->begin);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject FollowType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.Follow",
    .tp_basicsize = sizeof(Follow),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = follow_new,
    .tp_members = follow_members,
    .tp_methods = follow_methods,
    .tp_traverse = (traverseproc)follow_traverse,
    .tp_dealloc = (destructor)follow_dealloc,
};

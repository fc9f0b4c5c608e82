//! The values of GGUF keys.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

/// All kinds, with the names that Python gives them.
const KINDS: [(ValueKind, &str); 13] = {
    use ValueKind::*;
    [
        (U8, "u8"),
        (I8, "i8"),
        (U16, "u16"),
        (I16, "i16"),
        (U32, "u32"),
        (I32, "i32"),
        (F32, "f32"),
        (Bool, "bool"),
        (String, "string"),
        (Array, "array"),
        (U64, "u64"),
        (I64, "i64"),
        (F64, "f64"),
    ]
};

impl ValueKind {
    pub fn from_id(id: u32) -> Option<Self> {
        KINDS.get(id as usize).map(|(kind, _)| *kind)
    }

    pub fn from_name(name: &str) -> Option<Self> {
        KINDS.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }

    /// GGUF's number for the kind: they are declared in its order.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// The fewest bytes that a value of this kind takes in a file.
    pub fn min_bytes(self) -> usize {
        use ValueKind::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | String => 8,
            Array => 12,
        }
    }
}

/// An array's elements. Scalars stay as the file's bytes: an array takes no more memory than it does in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    Scalars { kind: ValueKind, bytes: Vec<u8> },
    Strings(Vec<String>),
    Arrays(Vec<Array>),
}

impl Array {
    pub fn len(&self) -> usize {
        match self {
            Array::Scalars { kind, bytes } => bytes.len() / kind.min_bytes(),
            Array::Strings(v) => v.len(),
            Array::Arrays(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn element_kind(&self) -> ValueKind {
        match self {
            Array::Scalars { kind, .. } => *kind,
            Array::Strings(_) => ValueKind::String,
            Array::Arrays(_) => ValueKind::Array,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.element_kind().id().to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        match self {
            Array::Scalars { bytes, .. } => out.extend(bytes),
            Array::Strings(v) => v.iter().for_each(|s| write_string(s, out)),
            Array::Arrays(v) => v.iter().for_each(|array| array.write(out)),
        }
    }
}

fn write_string(s: &str, out: &mut Vec<u8>) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// A scalar from its `kind.min_bytes()` bytes; none where they are no value of the kind.
    pub fn scalar(kind: ValueKind, bytes: &[u8]) -> Option<Self> {
        Some(match kind {
            ValueKind::U8 => Value::U8(*bytes.first()?),
            ValueKind::I8 => Value::I8(*bytes.first()? as i8),
            ValueKind::U16 => Value::U16(u16::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I16 => Value::I16(i16::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::U32 => Value::U32(u32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I32 => Value::I32(i32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::U64 => Value::U64(u64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I64 => Value::I64(i64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::F32 => Value::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::F64 => Value::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::Bool => match bytes.first()? {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                _ => return None,
            },
            ValueKind::String | ValueKind::Array => return None,
        })
    }

    /// Appends kind and value as a file has them.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut put = |kind: ValueKind, bytes: &[u8]| {
            out.extend(kind.id().to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Value::U8(v) => put(ValueKind::U8, &v.to_le_bytes()),
            Value::I8(v) => put(ValueKind::I8, &v.to_le_bytes()),
            Value::U16(v) => put(ValueKind::U16, &v.to_le_bytes()),
            Value::I16(v) => put(ValueKind::I16, &v.to_le_bytes()),
            Value::U32(v) => put(ValueKind::U32, &v.to_le_bytes()),
            Value::I32(v) => put(ValueKind::I32, &v.to_le_bytes()),
            Value::U64(v) => put(ValueKind::U64, &v.to_le_bytes()),
            Value::I64(v) => put(ValueKind::I64, &v.to_le_bytes()),
            Value::F32(v) => put(ValueKind::F32, &v.to_le_bytes()),
            Value::F64(v) => put(ValueKind::F64, &v.to_le_bytes()),
            Value::Bool(v) => put(ValueKind::Bool, &[*v as u8]),
            Value::String(v) => {
                put(ValueKind::String, &[]);
                write_string(v, out);
            }
            Value::Array(v) => {
                put(ValueKind::Array, &[]);
                v.write(out);
            }
        }
    }

    /// An unsigned integer of any width, or a signed one that isn't negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }
}

/// Short, for error messages.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Value::U8(v) => write!(f, "{v} (u8)"),
            Value::I8(v) => write!(f, "{v} (i8)"),
            Value::U16(v) => write!(f, "{v} (u16)"),
            Value::I16(v) => write!(f, "{v} (i16)"),
            Value::U32(v) => write!(f, "{v} (u32)"),
            Value::I32(v) => write!(f, "{v} (i32)"),
            Value::U64(v) => write!(f, "{v} (u64)"),
            Value::I64(v) => write!(f, "{v} (i64)"),
            Value::F32(v) => write!(f, "{v} (f32)"),
            Value::F64(v) => write!(f, "{v} (f64)"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::String(v) => write!(f, "{:?}", v.chars().take(60).collect::<String>()),
            Value::Array(v) => write!(f, "an array of {}", v.len()),
        }
    }
}

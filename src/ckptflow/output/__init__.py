"""What a conversion leaves on disk: safetensors files, the model directory around them, the record."""
